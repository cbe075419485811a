"""The figures of a bench, as a page and as pictures."""
