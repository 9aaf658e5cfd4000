"""The instruments of a running engine: traces of its steps, and which steps, loads and waits are slow, and why."""
