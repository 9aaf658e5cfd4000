"""OpenAI's APIs: bodies in, answers out."""
