// CPU kernels: a linear layer for few rows and attention over a static KV cache.
//
// Both are shape-invariant by construction: every output element is one chain of float32 fused
// multiply-adds over its own row, in the order of k (or of the key), whatever the other rows are,
// however many there are, and however the rows are cut into tiles or spread over threads. Plain C
// interface, no torch headers: builds in a second.

#ifdef __x86_64__
#include <immintrin.h>
#endif
#include <omp.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX512F__
constexpr int VL = 16, MAX_ROWS = 12;  // floats per vector, rows per tile (the registers' limit)
#else
constexpr int VL = 8, MAX_ROWS = 6;
#endif
constexpr int NB = 2 * VL;  // output columns per block of packed weights

typedef float vf __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef float v8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));

template <class V> static inline V load(const void* p) { V v; memcpy(&v, p, sizeof v); return v; }

// Formats of a block w [K, NB]. In bf16 two neighbours share a 32-bit lane: the even ones come out
// in w0, the odd ones in w1, and `column` undoes that.
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

// The place in its block that output i of W::get comes from.
template <class W> static inline int column(int i) { return i; }
template <> inline int column<BF16>(int i) { return i < VL ? 2 * i : 2 * (i - VL) + 1; }

// y[at[r], 0..NB) = sum over k of x[r, k] w[k, 0..NB). With ORDER, x comes from an unpacked block:
// in the order of `get`.
template <class W, int R, bool ORDER>
static void tile(const float* x, const typename W::T* w, float* y, const int* at, int K, int N) {
  vf a[R][2];
  for (int r = 0; r < R; r++) a[r][0] = a[r][1] = vf{};
  for (int k = 0; k < K; k++) {
    int row = ORDER ? k / NB * NB + column<W>(k % NB) : k;
    __builtin_prefetch(w + NB * (k + 32));
    vf w0, w1;
    W::get(w + NB * row, w0, w1);
    for (int r = 0; r < R; r++) {
      vf b = x[(int64_t)r * K + k] - vf{};
      a[r][0] += b * w0;
      a[r][1] += b * w1;
    }
  }
  for (int r = 0; r < R; r++) memcpy(y + (int64_t)at[r] * N, a[r], NB * 4);
}

template <class W, bool ORDER = false, int R = MAX_ROWS>
static void tiles(int rows, const float* x, const typename W::T* w, float* y, const int* at, int K,
                  int N) {
  if (rows == R) return tile<W, R, ORDER>(x, w, y, at, K, N);
  if constexpr (R > 1) tiles<W, ORDER, R - 1>(rows, x, w, y, at, K, N);
}

// exp(x) for x <= 87 to about 1 ulp; 0 below -87
static inline v8 exp8(v8 x) {
  i8 small = x < -87.0f;
  x = small ? v8{} : x;
  v8 n = x * 1.44269504f + 12582912.0f;  // round to nearest integer by the magic number 1.5 * 2^23
  i8 bits = ((i8)n - 0x4b400000) << 23;
  n -= 12582912.0f;
  v8 r = x - n * 0.693359375f + n * 2.12194440e-4f;
  v8 p = 1.9875691500e-4f - v8{};
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                  5.0000001201e-1f})
    p = p * r + c;
  p = p * r * r + r + 1.0f;
  return small ? v8{} : (v8)((i8)p + bits);
}
static inline v8 get8(const float* p) { return load<v8>(p); }

// One row before its product: RMSNorm with the given weight, or SwiGLU of [gate, up] (x then has 2
// K columns).
static void prologue(const float* x, float* out, int K, const float* norm, float eps) {
  if (norm) {
    v8 sum = v8{};
    for (int k = 0; k < K; k += 8) sum += get8(x + k) * get8(x + k);
    float total = 0;
    for (int i = 0; i < 8; i++) total += sum[i];
    float scale = 1.0f / sqrtf(total / K + eps);
    for (int k = 0; k < K; k++) out[k] = x[k] * scale * norm[k];
  } else {
    for (int k = 0; k < K; k += 8) {
      v8 gate = get8(x + k), minus = -gate, limit = 87.0f - v8{};
      v8 y = gate / (1.0f + exp8(minus < limit ? minus : limit)) * get8(x + K + k);
      memcpy(out + k, &y, sizeof y);
    }
  }
}

// Rows of the step that this thread runs: those whose position is not -1. The others cost nothing
// and come out as 0.
static thread_local std::vector<int> live;
static thread_local int step_rows = -1;

// The rows of x [M, columns] that a linear layer runs: how many, where they are, and what
// prologue makes of them, [count, K].
struct Rows {
  int count;
  const int* at;
  float* ready;
};

static Rows prepare(const float* x, float* y, int M, int K, int N, const float* norm, float eps,
                    bool swiglu) {
  static thread_local std::vector<float> ready_rows;
  static thread_local std::vector<int> all;
  if (M != step_rows) {
    all.resize(M);
    for (int m = 0; m < M; m++) all[m] = m;
  }
  const int* at = M == step_rows ? live.data() : all.data();
  int rows = M == step_rows ? live.size() : M, columns = K * (1 + swiglu);
  ready_rows.resize((size_t)rows * K);
  float* ready = ready_rows.data();
  for (int m = 0, r = 0; m < M; m++) {
    if (r < rows && at[r] == m) r++;
    else memset(y + (int64_t)m * N, 0, N * 4);
  }
#pragma omp parallel for if (rows > 16)
  for (int r = 0; r < rows; r++) {
    const float* row = x + (int64_t)at[r] * columns;
    if (norm || swiglu) prologue(row, ready + (int64_t)r * K, K, norm, eps);
    else memcpy(ready + (int64_t)r * K, row, K * 4);
  }
  return {rows, at, ready};
}

// The tile for packed bf16 weights: w [K / 2, NB] lanes, each with column j of rows k and k + 1.
template <int R>
static void pair_tile(const float* x, const uint32_t* w, float* y, const int* at, int K, int N) {
  vf a[R][2];
  for (int r = 0; r < R; r++) a[r][0] = a[r][1] = vf{};
  for (int k = 0; k < K; k += 2, w += NB) {
    __builtin_prefetch(w + NB * 16);
    __builtin_prefetch(w + NB * 16 + VL);
    vu w0 = load<vu>(w), w1 = load<vu>(w + VL);
    for (int i = 0; i < 2; i++) {
      vf v0 = (vf)(i ? w0 & 0xffff0000u : w0 << 16), v1 = (vf)(i ? w1 & 0xffff0000u : w1 << 16);
      for (int r = 0; r < R; r++) {
        vf b = x[(int64_t)r * K + k + i] - vf{};
        a[r][0] += b * v0;
        a[r][1] += b * v1;
      }
    }
  }
  for (int r = 0; r < R; r++) memcpy(y + (int64_t)at[r] * N, a[r], NB * 4);
}

template <int R = MAX_ROWS>
static void pair_tiles(int rows, const float* x, const uint32_t* w, float* y, const int* at, int K,
                       int N) {
  if (rows == R) return pair_tile<R>(x, w, y, at, K, N);
  if constexpr (R > 1) pair_tiles<R - 1>(rows, x, w, y, at, K, N);
}

// y [M, N] = prologue(x) w^T, w [N / NB, K, NB] float32 or [N / NB, K / 2, NB] pairs of bf16
template <bool PAIRS>
static void linear(const float* x, const float* w, float* y, int M, int K, int N,
                   const float* norm, float eps, bool swiglu) {
  auto [rows, at, ready] = prepare(x, y, M, K, N, norm, eps, swiglu);
#pragma omp parallel for schedule(static)
  for (int n = 0; n < N / NB; n++) {
    const float* wn = w + (int64_t)n * (PAIRS ? K / 2 : K) * NB;
    static thread_local std::vector<float> wide;  // many rows: convert a block once, then reuse it
    bool widen = PAIRS && rows >= 4 * MAX_ROWS;
    if (widen) {
      wide.resize((size_t)K * NB + NB * 32);
      for (int k = 0; k < K; k++)
        for (int j = 0; j < NB; j += VL) {
          vu u = load<vu>(wn + k / 2 * NB + j), v = k % 2 ? u & 0xffff0000u : u << 16;
          memcpy(&wide[k * NB + j], &v, sizeof v);
        }
    }
    for (int r = 0; r < rows;) {  // even tiles: 8 = 4 + 4
      int left = (rows - r + MAX_ROWS - 1) / MAX_ROWS, R = (rows - r + left - 1) / left;
      const float* xr = ready + (int64_t)r * K;
      if (PAIRS && !widen) pair_tiles(R, xr, (const uint32_t*)wn, y + n * NB, at + r, K, N);
      else tiles<F32>(R, xr, widen ? wide.data() : wn, y + n * NB, at + r, K, N);
      r += R;
    }
  }
}

// acc + the products of 4 unsigned weights (in each lane) with 4 signed activations (a)
static inline vi dot4(vi acc, vu w, int32_t a) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(a));
#elif defined(__AVX2__)
  __m256i v = _mm256_set1_epi32(a), low = _mm256_set1_epi16(255);
  __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8), odd = _mm256_srai_epi16(v, 8);
  acc += (vi)_mm256_madd_epi16(_mm256_and_si256((__m256i)w, low), even);
  return acc + (vi)_mm256_madd_epi16(_mm256_srli_epi16((__m256i)w, 8), odd);
#else
  for (int i = 0; i < 4; i++) acc += (vi)(w >> (8 * i) & 255) * (int8_t)(a >> (8 * i));
  return acc;
#endif
}

// Half precision in the low 16 bits of each lane, as float.
static inline vf half(vu h) {
  return (vf)((vu)((vf)((h & 0x7fff) << 13) * 0x1p112f) | (h & 0x8000) << 16);
}

// The quantized tile. Rows x [R, K] are int8, each `run` of them to be multiplied by a scale; sums
// are the runs' sums, both [R, K / run]. Weights are codes in 0..255, with one (factor, low) for
// the whole row, or 0..15, with one for each run: w = factor * code + low. Integers are exact and
// runs are added in order: shape-invariant.
template <int BITS, int R>
static void qtile(const int8_t* x, const float* sums, const float* scales, const uint32_t* w,
                  const uint32_t* factors, float* y, const int* at, int K, int N, int run) {
  vf total[R][2];
  for (int r = 0; r < R; r++) total[r][0] = total[r][1] = vf{};
  for (int g = 0; g < K / run; g++, factors += BITS == 4 ? NB : 0) {
    vi a[R][2];
    for (int r = 0; r < R; r++) a[r][0] = a[r][1] = vi{};
    for (int k = 0; k < run; k += 32 / BITS, w += NB) {
      __builtin_prefetch(w + NB * 16);
      __builtin_prefetch(w + NB * 16 + VL);
      vu w0 = load<vu>(w), w1 = load<vu>(w + VL);
      for (int r = 0; r < R; r++) {
        const int8_t* xr = x + (int64_t)r * K + g * run + (BITS == 4 ? k / 2 : k);
        int32_t x0, x1;
        memcpy(&x0, xr, 4);
        if constexpr (BITS == 8) {
          a[r][0] = dot4(a[r][0], w0, x0);
          a[r][1] = dot4(a[r][1], w1, x0);
        } else {  // codes of k..k + 3 in the low nibbles, of those 16 further in the high ones
          memcpy(&x1, xr + 16, 4);
          a[r][0] = dot4(dot4(a[r][0], w0 & 0x0f0f0f0f, x0), w0 >> 4 & 0x0f0f0f0f, x1);
          a[r][1] = dot4(dot4(a[r][1], w1 & 0x0f0f0f0f, x0), w1 >> 4 & 0x0f0f0f0f, x1);
        }
      }
    }
    for (int v = 0; v < 2; v++) {
      vu f = load<vu>(factors + v * VL);
      vf factor = half(f), low = half(f >> 16);
      for (int r = 0; r < R; r++) {
        int at_run = r * (K / run) + g;
        vf sum = __builtin_convertvector(a[r][v], vf) * factor + low * sums[at_run];
        total[r][v] += sum * scales[at_run];
      }
    }
  }
  for (int r = 0; r < R; r++) memcpy(y + (int64_t)at[r] * N, total[r], NB * 4);
}

template <int BITS, int R = MAX_ROWS / (BITS == 4 ? 2 : 1)>
static void qtiles(int rows, const int8_t* x, const float* sums, const float* scales,
                   const uint32_t* w, const uint32_t* factors, float* y, const int* at, int K,
                   int N, int run) {
  if (rows == R) return qtile<BITS, R>(x, sums, scales, w, factors, y, at, K, N, run);
  if constexpr (R > 1) qtiles<BITS, R - 1>(rows, x, sums, scales, w, factors, y, at, K, N, run);
}

// x [K] -> by runs: round(x / scale) in -127..127, the sum of those, the scale
static void quantize(const float* x, int8_t* q, float* sums, float* scales, int K, int run) {
  for (int g = 0; g < K / run; g++, x += run, q += run) {
    float top = 1e-30f;
    for (int k = 0; k < run; k++) top = fabsf(x[k]) > top ? fabsf(x[k]) : top;
    float inverse = 127.0f / top;
    i8 sum = i8{};
    for (int k = 0; k < run; k += 8) {
      i8 bits = (i8)(get8(x + k) * inverse + 12582912.0f) - 0x4b400000;  // as in exp8
      for (int i = 0; i < 8; i++) q[k + i] = bits[i];
      sum += bits;
    }
    int total = 0;
    for (int i = 0; i < 8; i++) total += sum[i];
    sums[g] = total;
    scales[g] = top / 127.0f;
  }
}

// y [M, N] = prologue(x) w^T with quantized weights: w [N / NB, K / (32 / BITS), NB] uint32,
// factors [N / NB, 1 or K / 32, NB] (two halves each)
template <int BITS>
static void qlinear(const float* x, const uint32_t* w, const uint32_t* factors, float* y, int M,
                    int K, int N, const float* norm, float eps, bool swiglu) {
  static thread_local std::vector<int8_t> codes;
  static thread_local std::vector<float> row_sums, row_scales;
  const int run = BITS == 4 || K % 64 ? 32 : 64, groups = BITS == 4 ? K / 32 : 1;
  auto [rows, at, ready] = prepare(x, y, M, K, N, norm, eps, swiglu);
  codes.resize((size_t)rows * K);
  row_sums.resize((size_t)rows * (K / run));
  row_scales.resize((size_t)rows * (K / run));
  int8_t* q = codes.data();
  float *sums = row_sums.data(), *scales = row_scales.data();
#pragma omp parallel for if (rows > 16)
  for (int r = 0; r < rows; r++) {
    int64_t k = (int64_t)r * K;
    quantize(ready + k, q + k, sums + k / run, scales + k / run, K, run);
  }
  constexpr int MOST = MAX_ROWS / (BITS == 4 ? 2 : 1);
#pragma omp parallel for schedule(static)
  for (int n = 0; n < N / NB; n++)
    for (int r = 0; r < rows;) {
      int left = (rows - r + MOST - 1) / MOST, R = (rows - r + left - 1) / left;
      int64_t k = (int64_t)r * K;
      qtiles<BITS>(R, q + k, sums + k / run, scales + k / run,
                   w + (int64_t)n * (K / (32 / BITS)) * NB, factors + (int64_t)n * groups * NB,
                   y + n * NB, at + r, K, N, run);
      r += R;
    }
}

// s[0..width): scores of one row; what lies outside its keys becomes 0 in the softmax. -> 1 / sum
template <class W>
static float softmax(float* s, int64_t width, int64_t pos, int window, float scale) {
  int64_t begin = window > 0 && pos >= window ? pos - window + 1 : 0;  // sliding window, 0 = none
  for (int64_t j = 0; j < width; j += NB)
    if (j < begin || j + NB > pos + 1)
      for (int i = 0; i < NB; i++)
        if (j + column<W>(i) < begin || j + column<W>(i) > pos) s[j + i] = -INFINITY;
  v8 top = get8(s), sum = v8{};
  for (int64_t j = 8; j < width; j += 8) { v8 x = get8(s + j); top = x > top ? x : top; }
  float m = top[0];
  for (int i = 1; i < 8; i++) m = top[i] > m ? top[i] : m;
  for (int64_t j = 0; j < width; j += 8) {
    v8 x = exp8((get8(s + j) - m) * scale);
    memcpy(s + j, &x, sizeof x);
    sum += x;
  }
  float total = 0;
  for (int i = 0; i < 8; i++) total += sum[i];
  return 1.0f / total;
}

// q, out [N, T, H, E]; k [B, G, S / NB, E, NB]; v [B, G, E / NB, S, NB]; pos [N, T], -1: a padding
// row (output 0); slot [N]. Scores and weighted sums are the same tiles as the linear layer's.
template <class W>
static void attend(const float* q, const typename W::T* k, const typename W::T* v, float* out,
                   const int64_t* pos, const int64_t* slot, int N, int T, int H, int G, int S,
                   int E, int window, float scale) {
  int P = H / G, blocks = (T * P + MAX_ROWS - 1) / MAX_ROWS;
#pragma omp parallel for schedule(dynamic)
  for (int task = 0; task < N * G * blocks; task++) {
    int b = task % blocks, g = task / blocks % G, n = task / blocks / G, R = 0;
    float* outs[MAX_ROWS];
    int64_t at[MAX_ROWS], last = 0;
    static thread_local std::vector<float> rows, scores;
    rows.resize(MAX_ROWS * E);
    for (int r = b * MAX_ROWS; r < (b + 1) * MAX_ROWS && r < T * P; r++) {
      int64_t p = pos[n * T + r / P], offset = (((int64_t)n * T + r / P) * H + g * P + r % P) * E;
      if (p < 0) { memset(out + offset, 0, E * 4); continue; }
      memcpy(&rows[R * E], q + offset, E * 4);
      last = p > last ? p : last;
      outs[R] = out + offset;
      at[R++] = p;
    }
    if (!R) continue;
    int64_t width = (last / NB + 1) * NB, head = (slot[n] * G + g) * (int64_t)S * E;
    scores.resize(R * width);
    float inverse[MAX_ROWS], y[MAX_ROWS * NB];
    int order[MAX_ROWS];
    for (int r = 0; r < R; r++) order[r] = r;
    for (int64_t j = 0; j < width; j += NB)
      tiles<W>(R, rows.data(), k + head + j * E, &scores[j], order, E, width);
    for (int r = 0; r < R; r++)
      inverse[r] = softmax<W>(&scores[r * width], width, at[r], window, scale);
    for (int e = 0; e < E; e += NB) {
      tiles<W, true>(R, scores.data(), v + head + (int64_t)e * S, y, order, width, NB);
      for (int r = 0; r < R; r++)
        for (int i = 0; i < NB; i++) outs[r][e + column<W>(i)] = y[r * NB + i] * inverse[r];
    }
  }
}

extern "C" {
int columns_per_block() { return NB; }
// Say which of M rows the linear layers run that this thread calls with M rows from now on.
void begin_step(const int64_t* positions, int M) {
  live.clear();
  for (int m = 0; m < M; m++)
    if (positions[m] >= 0) live.push_back(m);
  step_rows = M;
}
// End the calling thread's OpenMP workers. With more workers alive than cores, libgomp stops
// spinning at barriers and every parallel region pays for waking a sleeper: 61 ms a step instead of
// 30, measured on 2 cores.
void release_threads() { omp_pause_resource_all(omp_pause_soft); }
void linear_f32(const float* x, const float* w, float* y, int M, int K, int N, const float* norm,
                float eps, int swiglu) {
  linear<false>(x, w, y, M, K, N, norm, eps, swiglu);
}
void linear_bf16(const float* x, const float* w, float* y, int M, int K, int N, const float* norm,
                 float eps, int swiglu) {
  linear<true>(x, w, y, M, K, N, norm, eps, swiglu);
}
void qlinear(const float* x, const uint32_t* w, const uint32_t* factors, float* y, int M, int K,
             int N, int bits, const float* norm, float eps, int swiglu) {
  (bits == 4 ? qlinear<4> : qlinear<8>)(x, w, factors, y, M, K, N, norm, eps, swiglu);
}
void attend_f32(const float* q, const float* k, const float* v, float* out, const int64_t* pos,
                const int64_t* slot, int N, int T, int H, int G, int S, int E, int window,
                float scale) {
  attend<F32>(q, k, v, out, pos, slot, N, T, H, G, S, E, window, scale);
}
void attend_bf16(const float* q, const uint16_t* k, const uint16_t* v, float* out,
                 const int64_t* pos, const int64_t* slot, int N, int T, int H, int G, int S, int E,
                 int window, float scale) {
  attend<BF16>(q, k, v, out, pos, slot, N, T, H, G, S, E, window, scale);
}
}
