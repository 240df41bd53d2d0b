"""All jobs of a folder: listing, moving, archiving and removing them."""
