"""`openinfer selftest`: tests, accuracy gates and speed of this machine."""
