"""`radixkv cache`: what lies in the folder of a disk tier."""
