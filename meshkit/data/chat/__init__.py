"""Chats to tokens: templates, and which tokens are trained on."""
