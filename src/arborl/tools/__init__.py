"""Helpers that know nothing of the method: files, web server, imports by name, quiet libraries, caches."""
