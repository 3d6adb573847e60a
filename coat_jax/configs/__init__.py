"""The configs that come with the package, each a file: `coat train llama_tiny`.

A bare `coat train` lists them.
"""
