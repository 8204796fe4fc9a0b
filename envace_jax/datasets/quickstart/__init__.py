"""The quickstart domain: a small service desk with a real stateful environment, made from nothing but a
seed."""
