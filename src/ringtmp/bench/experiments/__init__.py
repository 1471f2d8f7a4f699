"""One experiment per file: choices in, jobs out; measurements in, a section of the page out. Pure."""
