"""avref"""
