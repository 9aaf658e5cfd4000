"""openinfer.frontend"""
