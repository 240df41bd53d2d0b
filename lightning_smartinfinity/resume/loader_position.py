def keeping_position(loader): return loader
