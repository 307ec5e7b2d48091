"""What a run consists of and leaves behind: its config, its workdir, and the files in it."""
