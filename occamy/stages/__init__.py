"""The stages of the recipe as plain functions over a run directory: what a component or a command calls, and no more.

Every stage is idempotent: finished work with equal inputs is returned at once, unfinished work is taken up again.
"""
