"""Programs that measure: each writes its figures, with their parents, and its picture.

They import the package; the package never imports them.
"""
