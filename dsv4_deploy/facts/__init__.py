"""What is here: the checkpoint on disk and the GPUs of this host. Reads only, decides nothing."""
