"""What people read on a terminal: tables, live boards, command lines, units."""
