"""Draw a run or a plan as SVG, and read the traces that the pictures show. No drawing library is used."""
