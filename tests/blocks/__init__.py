"""`jattn.blocks`: tables, pools, planning and states."""
