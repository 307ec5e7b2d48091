"""The config of a run, its workdir, and the files in it."""
