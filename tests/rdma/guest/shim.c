/* Preloaded into the guest's processes. A queue pair's retry count of 7 means seven tries to a real adapter and "for
 * ever" to rdma_rxe, so that a dead peer is noticed after some seconds on the one and very late on the other. Mooncake
 * always asks for 7; this makes it 6.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <infiniband/verbs.h>

typedef int modify_qp(struct ibv_qp *, struct ibv_qp_attr *, int);

int ibv_modify_qp(struct ibv_qp *pair, struct ibv_qp_attr *wanted, int mask)
{
    static modify_qp *real;
    struct ibv_qp_attr changed = *wanted;

    if (!real)
        real = (modify_qp *)dlvsym(dlopen("libibverbs.so.1", RTLD_LAZY), "ibv_modify_qp", "IBVERBS_1.1");
    if ((mask & IBV_QP_RETRY_CNT) && changed.retry_cnt == 7)
        changed.retry_cnt = 6;
    return real(pair, &changed, mask);
}
