"""Many devices and processes as one.

distributed      processes find each other
stop             signals after which all processes stop, at the same step
mesh             devices as axes data, fsdp, expert and tensor; shardings, and batches
"""
