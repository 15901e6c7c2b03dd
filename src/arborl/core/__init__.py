"""Pure tensor functions: the method without models, files or processes. Imports torch and nothing else of ours."""
