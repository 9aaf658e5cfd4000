"""`openinfer plan`: latencies and throughput of a server over load, before there is one."""
