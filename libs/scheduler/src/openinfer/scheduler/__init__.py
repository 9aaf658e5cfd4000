"""openinfer.scheduler"""
