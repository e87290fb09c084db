/* What UCX asks of NVIDIA's management library, for the stand-in driver beside this file: no links between devices. */
#define EXPORT __attribute__((visibility("default")))
enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6 };

EXPORT int nvmlInit_v2(void) { return SUCCESS; }
EXPORT int nvmlShutdown(void) { return SUCCESS; }
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
    *device = (void *)(unsigned long)(index + 1);
    return index < 8 ? SUCCESS : NOT_FOUND;
}
EXPORT int nvmlDeviceGetFieldValues(void *device, int count, void *values)
{
    (void)device; (void)count; (void)values;
    return NOT_SUPPORTED;
}
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *info)
{
    (void)device; (void)link; (void)info;
    return NOT_SUPPORTED;
}
/* A state of 0 says that there is no fabric; an error here would be logged by UCX. */
EXPORT int nvmlDeviceGetGpuFabricInfo(void *device, void *info)
{
    (void)device;
    __builtin_memset(info, 0, 28);
    return SUCCESS;
}
EXPORT int nvmlDeviceGetGpuFabricInfoV(void *device, void *info)
{
    (void)device;
    __builtin_memset((char *)info + 4, 0, 32);
    return SUCCESS;
}
EXPORT const char *nvmlErrorString(int result)
{
    (void)result;
    return "not there (stand-in)";
}
