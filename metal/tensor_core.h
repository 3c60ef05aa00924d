// What tensor_core_prepare.cu and tensor_core.cu share: pairs of bfloat16, 16 x 16 products, loads (sm_80 and later).
constexpr int PAD = 8;  // bfloat16 between rows in shared memory, so that ldmatrix meets no bank twice
typedef __nv_bfloat16 bf16;

METAL_FUNC uint pack(float x, float y) {
  const __nv_bfloat162 p = __floats2bfloat162_rn(x, y);
  return *(const uint*)&p;
}
// Two numbers as a pair of high parts and a pair of low parts.
METAL_FUNC void split(float x, float y, uint& high, uint& low) {
  high = pack(x, y);
  low = pack(x - __uint_as_float(high << 16), y - __uint_as_float(high & 0xffff0000u));
}
METAL_FUNC void product(float (&d)[4], const uint (&a)[4], uint b0, uint b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Both 8-column halves of a 16 x 16 right operand.
METAL_FUNC void products(float (&d0)[4], float (&d1)[4], const uint (&a)[4], const uint (&b)[4]) {
  product(d0, a, b[0], b[1]);
  product(d1, a, b[2], b[3]);
}
METAL_FUNC void load4(uint (&r)[4], const bf16* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"((uint)__cvta_generic_to_shared(p)) : "memory");
}
METAL_FUNC void load4_transposed(uint (&r)[4], const bf16* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"((uint)__cvta_generic_to_shared(p)) : "memory");
}
// 16 bytes from device to shared memory, in the background; zeros instead where !valid
METAL_FUNC void copy16(void* to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
      :: "r"((uint)__cvta_generic_to_shared(to)), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
