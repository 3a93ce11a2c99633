"""Random numbers that do not depend on the layout: seeds derived from names, streams per drawing module."""
