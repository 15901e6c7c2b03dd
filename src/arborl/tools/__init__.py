"""Helpers without knowledge of the method: files, web server, imports by name, quiet libraries, caches."""
