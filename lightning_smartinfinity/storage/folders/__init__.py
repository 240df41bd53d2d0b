"""A folder on a disk and the files in it: owner, lock, manifest, direct I/O, and replacing a whole folder."""
