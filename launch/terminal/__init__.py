"""Parse command lines, and print for people: fields, tables, live boards, numbers with units."""
