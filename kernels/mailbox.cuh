// One-sided messages within a cluster: each CTA is sent a number of bytes that it knows, and waits until they have come.
// A cluster barrier would do too, but its release waits for every store to global memory that is under way.
#pragma once
#include "cluster.cuh"

struct Mailbox {
    u64 barrier;  // an mbarrier in the receiver's shared memory

    // By one thread, followed by a cluster barrier that all senders wait for (relaxed is enough).
    __device__ void open() {
        if (CLUSTER == 1) return;
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(address()) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }

    // By one thread, later, once. Messages may have come before.
    __device__ void expect(u32 bytes) {
        if (CLUSTER == 1) return;
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(address()), "r"(bytes) : "memory");
    }

    // 16 bytes to `to` in CTA `cta`, which has the same mailbox.
    __device__ void send16(void* to, u32 cta, uint4 v) {
        if (CLUSTER == 1) *(uint4*)to = v;
        else asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
                          :: "r"(remote(to, cta)), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(remote(&barrier, cta))
                          : "memory");
    }

    // All threads. What was sent here can be read; nobody sends here any more.
    __device__ void wait() {
        if (CLUSTER == 1) {
            __syncthreads();
            return;
        }
        const u32 b = address();
        u32 done = 0;
        while (!done)
            asm volatile("{\n\t.reg .pred p;\n\t"
                         "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n\t"
                         "selp.u32 %0, 1, 0, p;\n\t}" : "=r"(done) : "r"(b) : "memory");
    }

private:
    __device__ u32 address() const { return (u32)__cvta_generic_to_shared(&barrier); }
};
