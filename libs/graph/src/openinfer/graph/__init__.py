"""openinfer.graph"""
