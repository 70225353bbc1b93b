"""Integers and Paillier ciphertexts: keys, encoding, packing, powers and randomizers; no torch."""
