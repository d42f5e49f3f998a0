// CPU kernels: a linear layer for few rows and attention over a static KV cache.
//
// Both are shape-invariant by construction: every output element is one chain of float32 fused multiply-adds over
// its own row, in the order of k (or of the key), whatever the other rows are, however many there are, and however
// the rows are cut into tiles or spread over threads. Plain C interface, no torch headers: builds in a second.

#include <omp.h>

#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX512F__
constexpr int VL = 16, MAX_ROWS = 12;  // floats per vector; rows per tile, so that 2 * MAX_ROWS sums fit the registers
#else
constexpr int VL = 8, MAX_ROWS = 6;
#endif
constexpr int NB = 2 * VL;  // output columns per block of packed weights

typedef float vf __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef float v8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));

template <class V> static inline V load(const void* p) { V v; memcpy(&v, p, sizeof v); return v; }

// Weight formats: w is [N / NB, K, NB]; in bf16 column j and column VL + j share a 32-bit lane.
struct BF16 {
  typedef uint16_t T;
  static inline void get(const T* w, vf& w0, vf& w1) {
    vu u = load<vu>(w);
    w0 = (vf)(u << 16);
    w1 = (vf)(u & 0xffff0000u);
  }
};
struct F32 {
  typedef float T;
  static inline void get(const T* w, vf& w0, vf& w1) { w0 = load<vf>(w); w1 = load<vf>(w + VL); }
};

template <class W, int R>
static void tile(const float* x, const typename W::T* w, float* y, int K, int N) {
  vf a[R][2];
  for (int r = 0; r < R; r++) a[r][0] = a[r][1] = vf{};
  for (int k = 0; k < K; k++) {
    __builtin_prefetch(w + NB * (k + 32));
    vf w0, w1;
    W::get(w + NB * k, w0, w1);
    for (int r = 0; r < R; r++) {
      vf b = x[(int64_t)r * K + k] - vf{};
      a[r][0] += b * w0;
      a[r][1] += b * w1;
    }
  }
  for (int r = 0; r < R; r++) memcpy(y + (int64_t)r * N, a[r], NB * 4);
}

template <class W, int R = MAX_ROWS>
static void tiles(int rows, const float* x, const typename W::T* w, float* y, int K, int N) {
  if (rows == R) return tile<W, R>(x, w, y, K, N);
  if constexpr (R > 1) tiles<W, R - 1>(rows, x, w, y, K, N);
}

template <class W>
static void linear(const float* x, const typename W::T* w, float* y, int M, int K, int N) {
#pragma omp parallel for schedule(static)
  for (int n = 0; n < N / NB; n++) {
    const typename W::T* wn = w + (int64_t)n * K * NB;
    static thread_local std::vector<float> wide;  // many rows: convert a block once, then reuse it
    bool widen = M >= 4 * MAX_ROWS;
    if (widen) {
      wide.resize((size_t)K * NB + NB * 32);
      for (int k = 0; k < K; k++) {
        vf w0, w1;
        W::get(wn + NB * k, w0, w1);
        memcpy(&wide[k * NB], &w0, sizeof w0);
        memcpy(&wide[k * NB + VL], &w1, sizeof w1);
      }
    }
    for (int m = 0; m < M;) {
      int left = (M - m + MAX_ROWS - 1) / MAX_ROWS, rows = (M - m + left - 1) / left;  // even tiles: 8 = 4 + 4
      const float* xm = x + (int64_t)m * K;
      float* ym = y + (int64_t)m * N + n * NB;
      if (widen) tiles<F32>(rows, xm, wide.data(), ym, K, N);
      else tiles<W>(rows, xm, wn, ym, K, N);
      m += rows;
    }
  }
}

// exp(x) for x <= 0 to about 1 ulp; 0 below -87
static inline v8 exp8(v8 x) {
  i8 small = x < -87.0f;
  x = small ? v8{} : x;
  v8 n = x * 1.44269504f + 12582912.0f;  // round to nearest integer by the magic number 1.5 * 2^23
  i8 bits = ((i8)n - 0x4b400000) << 23;
  n -= 12582912.0f;
  v8 r = x - n * 0.693359375f + n * 2.12194440e-4f;
  v8 p = 1.9875691500e-4f - v8{};
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) p = p * r + c;
  p = p * r * r + r + 1.0f;
  return small ? v8{} : (v8)((i8)p + bits);
}
static inline float sum8(v8 a) {
  return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
}

static inline v8 get8(const float* p) { return load<v8>(p); }
static inline v8 get8(const uint16_t* p) {
  typedef uint16_t h8 __attribute__((vector_size(16)));
  typedef uint32_t u8 __attribute__((vector_size(32)));
  return (v8)(__builtin_convertvector(load<h8>(p), u8) << 16);
}

// R query rows that share a KV head: q[r] [E], keys and values [S, E], row r sees keys 0..pos[r]
template <class T, int R>
static void attend_rows(const float* const* q, const T* k, const T* v, float* const* out, const int64_t* pos, int E,
                        int window, float scale) {
  int64_t last = 0;
  for (int r = 0; r < R; r++) last = pos[r] > last ? pos[r] : last;
  int64_t width = (last + 8) & ~7;
  static thread_local std::vector<float> buffer;
  buffer.resize(width * R);
  float* p = buffer.data();
  for (int64_t j = 0; j <= last; j++) {
    v8 a[R];
    for (int r = 0; r < R; r++) a[r] = v8{};
    for (int e = 0; e < E; e += 8) {
      v8 key = get8(k + j * E + e);
      for (int r = 0; r < R; r++) a[r] += get8(q[r] + e) * key;
    }
    for (int r = 0; r < R; r++) p[r * width + j] = sum8(a[r]) * scale;
  }
  float inverse[R];
  for (int r = 0; r < R; r++) {
    float* s = p + r * width;
    int64_t begin = window > 0 && pos[r] >= window ? pos[r] - window + 1 : 0;  // sliding window, 0 = none
    for (int64_t j = 0; j < begin; j++) s[j] = -1e30f;
    for (int64_t j = pos[r] + 1; j < width; j++) s[j] = -1e30f;
    v8 top = get8(s), sum = v8{};
    for (int64_t j = 8; j < width; j += 8) { v8 x = get8(s + j); top = x > top ? x : top; }
    float m = top[0];
    for (int i = 1; i < 8; i++) m = top[i] > m ? top[i] : m;
    for (int64_t j = 0; j < width; j += 8) {
      v8 x = exp8(get8(s + j) - m);
      memcpy(s + j, &x, sizeof x);
      sum += x;
    }
    inverse[r] = 1.0f / sum8(sum);
  }
  for (int e = 0; e < E; e += 16) {
    v8 a[R][2];
    for (int r = 0; r < R; r++) a[r][0] = a[r][1] = v8{};
    for (int64_t j = 0; j <= last; j++) {
      v8 v0 = get8(v + j * E + e), v1 = get8(v + j * E + e + 8);
      for (int r = 0; r < R; r++) {
        v8 b = p[r * width + j] - v8{};
        a[r][0] += b * v0;
        a[r][1] += b * v1;
      }
    }
    for (int r = 0; r < R; r++) {
      a[r][0] *= inverse[r];
      a[r][1] *= inverse[r];
      memcpy(out[r] + e, a[r], 64);
    }
  }
}

template <class T, int R = 6>
static void attend_some(int rows, const float* const* q, const T* k, const T* v, float* const* out,
                        const int64_t* pos, int E, int window, float scale) {
  if (rows == R) return attend_rows<T, R>(q, k, v, out, pos, E, window, scale);
  if constexpr (R > 1) attend_some<T, R - 1>(rows, q, k, v, out, pos, E, window, scale);
}

// q, out [N, T, H, E]; k, v [B, G, S, E]; pos [N, T], -1 for a padding row (output 0); slot [N]
template <class KV>
static void attend(const float* q, const KV* k, const KV* v, float* out, const int64_t* pos, const int64_t* slot,
                   int N, int T, int H, int G, int S, int E, int window, float scale) {
  int P = H / G, blocks = (T * P + 5) / 6;
#pragma omp parallel for schedule(dynamic)
  for (int task = 0; task < N * G * blocks; task++) {
    int b = task % blocks, g = task / blocks % G, n = task / blocks / G, rows = 0;
    const float* qs[6];
    float* outs[6];
    int64_t at[6];
    for (int r = b * 6; r < b * 6 + 6 && r < T * P; r++) {
      int64_t p = pos[n * T + r / P], offset = (((int64_t)n * T + r / P) * H + g * P + r % P) * E;
      if (p < 0) { memset(out + offset, 0, E * 4); continue; }
      qs[rows] = q + offset; outs[rows] = out + offset; at[rows++] = p;
    }
    int64_t head = (slot[n] * G + g) * (int64_t)S * E;
    if (rows) attend_some<KV>(rows, qs, k + head, v + head, outs, at, E, window, scale);
  }
}

extern "C" {
int columns_per_block() { return NB; }
// End the calling thread's OpenMP workers. With more workers alive than cores, libgomp stops spinning at barriers and
// every parallel region pays for waking a sleeper: 61 ms a step instead of 30, measured on 2 cores.
void release_threads() { omp_pause_resource_all(omp_pause_soft); }
void linear_f32(const float* x, const float* w, float* y, int M, int K, int N) { linear<F32>(x, w, y, M, K, N); }
void linear_bf16(const float* x, const uint16_t* w, float* y, int M, int K, int N) { linear<BF16>(x, w, y, M, K, N); }
void attend_f32(const float* q, const float* k, const float* v, float* out, const int64_t* pos, const int64_t* slot,
                int N, int T, int H, int G, int S, int E, int window, float scale) {
  attend(q, k, v, out, pos, slot, N, T, H, G, S, E, window, scale);
}
void attend_bf16(const float* q, const uint16_t* k, const uint16_t* v, float* out, const int64_t* pos,
                 const int64_t* slot, int N, int T, int H, int G, int S, int E, int window, float scale) {
  attend(q, k, v, out, pos, slot, N, T, H, G, S, E, window, scale);
}
}
