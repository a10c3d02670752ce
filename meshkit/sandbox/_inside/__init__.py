"""Inside of the sandbox: standard library only, imported by a bare interpreter that finds this folder and nothing of meshkit.

Imports are relative, since the package is `_inside` there and `meshkit.sandbox._inside` for everyone else.
"""
