"""Four ways to run the same op calls: cpu (references), cuda and interp (kernels), null (write them down)."""
