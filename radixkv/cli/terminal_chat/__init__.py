"""The command `radixkv chat`: a conversation in the terminal, with a server or a model in this process."""
