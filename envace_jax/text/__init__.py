"""Tokens, chat protocol, tool calls and their schemas: no model, no device."""
