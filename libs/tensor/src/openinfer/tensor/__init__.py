"""openinfer.tensor"""
