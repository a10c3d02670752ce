"""Text to token files: corpora, tokenizers, packing of documents into rows."""
