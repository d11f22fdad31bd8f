// The driver's library is on the host, not in a wheel: this one has the names that the linker asks
// for, and is left behind in the build's folder.
#define NAMED(name) int name(void) { return 999; }
NAMED(cuDeviceGet)
NAMED(cuDeviceGetAttribute)
NAMED(cuGetErrorString)
NAMED(cuMemAddressFree)
NAMED(cuMemAddressReserve)
NAMED(cuMemCreate)
NAMED(cuMemGetAllocationGranularity)
NAMED(cuMemMap)
NAMED(cuMemRelease)
NAMED(cuMemSetAccess)
NAMED(cuMemUnmap)
