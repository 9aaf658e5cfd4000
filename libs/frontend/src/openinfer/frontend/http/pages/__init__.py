"""The server's own pages."""
