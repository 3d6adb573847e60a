"""What the pages say, from results files and from the package: a module for each subject."""
