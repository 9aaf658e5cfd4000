"""For those who run a server: commands to the engine, metrics, traces."""
