"""Prompts and their embeddings: prompt files, the lists that come with the package, the cache on disk."""
