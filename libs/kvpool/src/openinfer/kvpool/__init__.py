"""openinfer.kvpool"""
