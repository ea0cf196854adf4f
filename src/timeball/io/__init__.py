"""Access to the machine: the clock, files, descriptors, signals, certificates. Other packages get them as arguments."""
