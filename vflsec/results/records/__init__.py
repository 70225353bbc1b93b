"""The contents of a results folder as typed data, and how to read them."""
