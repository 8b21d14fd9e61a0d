"""legato.hf_folder."""
