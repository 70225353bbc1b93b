"""A linear layer whose features are encrypted under Paillier: integers, groups, and the two parties' roles; no torch.

Party C holds the key and the features mu (B, g), party p the labels. Of the weights W (g, C) each holds one share.
"""
