"""What people write: specs of images, their patches and the hosts, and the checkout they lie in.

In: YAML files. Out: frozen models in which nothing is looked up yet and nothing is open.
Changing a spec makes its lock stale. Imports the shared modules only.
"""
