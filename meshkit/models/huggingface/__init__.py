"""Models to and from Hugging Face folders: configurations, names, weights, adapters."""
