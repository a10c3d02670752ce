"""The same work by meshkit and by its peers: one file a library, one table of cells, one run in turns."""
